"""``python -m hdi_callback`` is the command ``hdi``."""

from hdi_callback.command import main

if __name__ == "__main__":
    main()
