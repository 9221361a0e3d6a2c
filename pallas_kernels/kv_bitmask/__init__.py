"""The bitmask formats of keys and values: blocks of 128 positions as int32 words."""
