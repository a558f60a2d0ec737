"""The one rule table: the labels of rules.ops as rules of a mesh axis, the special axes (context,
experts), and arguments of an op on one rank."""
