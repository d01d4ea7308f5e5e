"""The command line, and what a person sees. Goes through the job API; never writes to the store."""
