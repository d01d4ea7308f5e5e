"""Files for operating gcore. The only code that is imported is in `deploy.tools`."""
