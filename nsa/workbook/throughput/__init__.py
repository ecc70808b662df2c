"""Training speed: tables, figures, sentences, aims."""
