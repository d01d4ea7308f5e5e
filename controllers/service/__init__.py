"""What a controller answers: the job API."""
