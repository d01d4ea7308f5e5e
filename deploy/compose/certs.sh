#!/bin/sh
# Creates the authority and the certificates of the two nodes, Prometheus and the admin: certs.sh [FOLDER [SECONDS]]. Existing files stay,
# except certificates that expire within 30 days, which are renewed. With SECONDS the script checks again after each interval and does not end.
set -eu
umask 077
cd "${1:-/certs}"

owned() {
  chown -R 10001:10001 node-0 node-1
  chown -R 65534:65534 prometheus # user `nobody` of Prometheus' image
}

[ -e ca.pem ] || gcore certs init --authority .
for node in node-0 node-1; do
  [ -e "$node/cert.pem" ] || gcore certs issue "$node" --host "$node" --host 127.0.0.1 --host localhost --authority .
done
[ -e prometheus/cert.pem ] || gcore certs issue prometheus --for user --role viewer --namespace '*' --authority .
[ -e you/cert.pem ] || gcore certs issue you --for user --role admin --authority .
chmod 711 .
while :; do
  gcore certs renew node-0 node-1 prometheus you --authority . --within-days 30 || [ -n "${2:-}" ]
  owned
  [ -n "${2:-}" ] || break
  sleep "$2"
done
