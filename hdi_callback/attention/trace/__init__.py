"""What establishes heads: the graph of one forward of a copy."""
