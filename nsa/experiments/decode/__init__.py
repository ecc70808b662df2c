"""What does a new token cost from a cache, and is it what its bytes say?"""
