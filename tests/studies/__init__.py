"""Programs that measure what the package does and costs; only the tests beside them run in `make test`."""
