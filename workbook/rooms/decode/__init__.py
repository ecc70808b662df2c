"""Cost of decoding a token from a cache, compared with the bytes it must read."""
