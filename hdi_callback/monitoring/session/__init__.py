"""One run that is watched: what it is asked for, what its trainer offers, what comes of each reading."""
