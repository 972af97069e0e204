"""Training code of the shipped model and of the risk heads (Lightning modules, data, configs)."""
