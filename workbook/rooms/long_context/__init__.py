"""One sequence on several GPUs: is it the same result, how fast, and in how much memory?"""
