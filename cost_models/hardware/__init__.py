"""What devices and links there are (presets), and on which links and nodes the ranks of a mesh axis
lie."""
