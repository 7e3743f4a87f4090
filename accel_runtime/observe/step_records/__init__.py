"""Records of the steps of a training: their format, and the recorder of a rank that writes them."""
