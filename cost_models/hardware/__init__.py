"""What devices and links there are (presets, each fact with its source), and on which links and
nodes the ranks of a mesh axis lie."""
