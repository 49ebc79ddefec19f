{{- define "carver.driver" -}}lvm.csi.carver{{- end }}

{{- define "carver.labels" -}}
app.kubernetes.io/name: carver
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "carver.selector" -}}
app.kubernetes.io/name: carver
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "carver.pluginDir" -}}
{{ .Values.kubeletDir }}/plugins/{{ include "carver.driver" . }}
{{- end }}

{{- /* A sidecar talks to the API server and to one socket, which only root may open. */ -}}
{{- define "carver.sidecarSecurity" -}}
securityContext:
  runAsUser: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "carver.check" -}}
{{- if not (has .Values.lvm2 (list "container" "host")) }}
{{- fail (printf "lvm2 is %q: it is container or host" .Values.lvm2) }}
{{- end }}
{{- if and (eq .Values.lvm2 "host") (not .Values.udev) }}
{{- fail "lvm2 of the host goes with the host's udev: udev must be true" }}
{{- end }}
{{- if and .Values.podMonitor.enabled (not .Values.metrics.enabled) }}
{{- fail "podMonitor needs metrics" }}
{{- end }}
{{- end }}
