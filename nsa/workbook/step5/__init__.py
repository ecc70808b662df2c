"""The step-5 hang: tables, figures, sentences, the decision."""
