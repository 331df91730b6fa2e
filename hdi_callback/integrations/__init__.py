"""The callbacks for each trainer: thin shells that unpack the framework's objects and delegate to a `Session`."""
