"""Does a long training stay as it began, and what do an allocator's settings change?"""
