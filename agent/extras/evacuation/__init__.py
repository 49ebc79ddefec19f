"""Evacuation: move all volumes of a node to other nodes, with the pods that use them."""
