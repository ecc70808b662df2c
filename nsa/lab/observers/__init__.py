"""What is passed to a trainer to see what it does; none passed, nothing is paid."""
