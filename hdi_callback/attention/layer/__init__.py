"""An attention layer: its heads, and the weight of each as it is really used."""
