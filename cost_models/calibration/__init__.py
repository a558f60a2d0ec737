"""From what `meshfold profile` measured to the figures of a cluster."""
