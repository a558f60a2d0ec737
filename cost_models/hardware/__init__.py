"""What devices and links there are, and which link every mesh axis lies on."""
