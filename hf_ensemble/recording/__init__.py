"""Records of which member decided what."""
