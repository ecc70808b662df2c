"""Objects passed to a trainer to see what it does; a training without any pays nothing."""
