"""How processes exchange data: agreement first, then as few messages as can be."""
