"""One network, many workers: Hogwild, parameter servers, local SGD, data-parallel training by seven frameworks."""
