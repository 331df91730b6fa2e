"""On the packages that people have: what is needed, what is built, and what differs between releases of torch."""
