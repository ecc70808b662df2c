"""Which backend is fastest and right at a shape?"""
