#!/bin/sh
# What compose.yaml runs once: the authority, and certificates of the two nodes, of Prometheus and of you. What is there stays.
set -eu
umask 077
cd "${1:-/certs}"
[ -e ca.pem ] || gcore certs init --authority .
for node in node-0 node-1; do
  [ -e "$node/cert.pem" ] || gcore certs issue "$node" --host "$node" --host 127.0.0.1 --host localhost --authority .
  chown -R 10001:10001 "$node"
done
[ -e prometheus/cert.pem ] || gcore certs issue prometheus --for user --role viewer --namespace '*' --authority .
chown -R 65534:65534 prometheus # `nobody`, as whom Prometheus' image runs
[ -e you/cert.pem ] || gcore certs issue you --for user --role admin --authority .
chmod 711 .
