"""Are planted faults called what they are, and healthy runs healthy?"""
