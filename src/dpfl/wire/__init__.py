"""What travels, and how: payloads in exact bytes, and the channels that carry them."""
