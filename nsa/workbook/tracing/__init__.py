"""What arrived on which rank: tables, figures, sentences."""
