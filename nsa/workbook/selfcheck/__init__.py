"""Planted against found: tables, figures, sentences."""
