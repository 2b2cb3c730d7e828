"""deltafuse beside the published packages it speaks the same files and numbers with."""
