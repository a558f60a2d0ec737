"""What galvatron_tables.py needs: case files, their judges and planners under these judges."""
