"""Interactive notebook: what a query sees, and what runs found."""
