"""TLS: who is who by certificate (`names`), a private authority (`authority`), the files (`material`), connections to others
(`connecting`), and what a server shows (`serving`). What is done for a caller who is known is `controllers.service.access`'s."""
