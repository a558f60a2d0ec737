"""A typed program as events for the simulator; bucket sizes and hierarchical all-reduces chosen by
simulating them."""
