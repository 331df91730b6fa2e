"""The default curves, written down beside the package."""

OF_WEIGHTS = ["hdi", "hdi_alignment", "hdi_energy_alignment", "hdi_worst_pair", "hdi_effective_heads"]
OF_OUTPUTS = ["head_correlation", "head_output_overlap", "head_covariance"]
