"""What is made of the figures that a job's workers tell."""
