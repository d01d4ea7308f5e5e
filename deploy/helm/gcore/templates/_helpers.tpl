{{- define "gcore.name" -}}
{{- if contains "gcore" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-gcore" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end -}}

{{- define "gcore.selector" -}}
app.kubernetes.io/name: gcore
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "gcore.labels" -}}
{{ include "gcore.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "gcore.image" -}}
{{- $variant := ternary "cuda" "cpu" (gt (int .Values.gpus) 0) -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $variant) }}{{ end -}}
{{- end -}}

{{- define "gcore.etcdImage" -}}
{{- with .Values.etcd.image }}{{ if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag }}{{ end }}{{ end -}}
{{- end -}}

{{- define "gcore.etcdName" -}}
{{ include "gcore.name" . }}-etcd
{{- end -}}

{{- /* DNS name of an etcd member. */ -}}
{{- define "gcore.etcdHost" -}}
{{ include "gcore.etcdName" .root }}-{{ .member }}.{{ include "gcore.etcdName" .root }}.{{ .root.Release.Namespace }}.svc
{{- end -}}

{{- define "gcore.etcdEndpoints" -}}
{{- if .Values.etcd.bundled -}}
{{- $found := list -}}
{{- range $member := until (int .Values.etcd.replicas) -}}
{{- $found = append $found (printf "https://%s:2379" (include "gcore.etcdHost" (dict "root" $ "member" $member))) -}}
{{- end -}}
{{ $found | toJson }}
{{- else -}}
{{ .Values.etcd.endpoints | toJson }}
{{- end -}}
{{- end -}}

{{- /* Names that clients use for the daemons: the Service's names and `tls.hosts`. */ -}}
{{- define "gcore.hosts" -}}
{{- $name := include "gcore.name" . -}}
{{- $space := printf "%s.%s" $name .Release.Namespace -}}
{{ join "," (concat (list $name $space (printf "%s.svc" $space) (printf "%s.svc.cluster.local" $space)) .Values.tls.hosts) }}
{{- end -}}

{{- /* Days before expiry at which a certificate is renewed: earlier than the alert, which fires two weeks before. */ -}}
{{- define "gcore.renewDays" -}}
{{ max 1 (min 30 (sub (int .Values.tls.days) 1)) }}
{{- end -}}

{{- /* Container that renews the certificates in `folder` of the volume `certificates`, mounted at `at`. With `secret`
(FROM:TO) it also keeps private copies of the Secret in the volume `etcd`. */ -}}
{{- define "gcore.renewal" -}}
- name: renewal
  image: {{ include "gcore.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [/opt/gcore/node/renew.sh, {{ .at }}/{{ .folder }}]
  env:
    - { name: GCORE_AUTHORITY, value: /authority }
    - { name: GCORE_RENEW_DAYS, value: {{ include "gcore.renewDays" .root | quote }} }
    {{- with .secret }}
    - { name: GCORE_SECRET, value: {{ . | quote }} }
    {{- end }}
    - { name: HOME, value: /tmp }
    - { name: NVIDIA_VISIBLE_DEVICES, value: void }
  resources: { requests: { cpu: 10m, memory: 32Mi }, limits: { memory: 256Mi } }
  securityContext: {{- include "gcore.restricted" . | nindent 4 }}
  volumeMounts:
    - { name: authority, mountPath: /authority, readOnly: true }
    - { name: certificates, mountPath: {{ .at }} }
    - { name: issuing, mountPath: /tmp }
    {{- if .secret }}
    - { name: etcd, mountPath: /secrets/etcd, readOnly: true }
    {{- end }}
{{- end -}}

{{- /* Security context of every container: no extra privileges. */ -}}
{{- define "gcore.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{- define "gcore.unprivileged" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}
