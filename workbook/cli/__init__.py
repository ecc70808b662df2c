"""Commands of `nsa`, one small module a family; each adds its parsers and is called by them."""
