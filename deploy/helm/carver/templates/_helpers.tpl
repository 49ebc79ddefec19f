{{- define "carver.fullname" -}}{{ .Values.fullnameOverride | default .Release.Name }}{{- end }}

{{- define "carver.name" -}}{{ .Values.nameOverride | default .Chart.Name }}{{- end }}

{{- define "carver.selector" -}}
app.kubernetes.io/name: {{ include "carver.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "carver.labels" -}}
{{ include "carver.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "carver.pluginDir" -}}
{{ .Values.kubeletDir }}/plugins/{{ .Values.driverName }}
{{- end }}

{{- define "carver.stateDir" -}}
{{- $own := ternary "carver" .Values.driverName (eq .Values.driverName "lvm.csi.carver") }}
{{- .Values.stateDir | default (printf "/var/lib/%s" $own) }}
{{- end }}

{{- define "carver.nodeAccount" -}}
{{ .Values.serviceAccounts.node.name | default (printf "%s-node" (include "carver.fullname" .)) }}
{{- end }}

{{- /* What the Deployment is: the cluster's controller, or where there is none the resizer. */ -}}
{{- define "carver.component" -}}
{{ ternary "controller" "resizer" .Values.controller.enabled }}
{{- end }}

{{- /* The Deployment's name; the controller's Service, Secret and ConfigMap have it, too. */ -}}
{{- define "carver.controller" -}}
{{ include "carver.fullname" . }}-{{ include "carver.component" . }}
{{- end }}

{{- define "carver.controllerAccount" -}}
{{ .Values.serviceAccounts.controller.name | default (include "carver.controller" .) }}
{{- end }}

{{- /* Who runs the sidecars but the resizer, and asks the cluster for orphans. */ -}}
{{- define "carver.sidecarsAccount" -}}
{{ include (ternary "carver.controllerAccount" "carver.nodeAccount" .Values.controller.enabled) . }}
{{- end }}

{{- /* Where the sidecars have the socket. */ -}}
{{- define "carver.socketDir" -}}
{{ ternary "/csi" (include "carver.pluginDir" .) .Values.controller.enabled }}
{{- end }}

{{- /* "true" where the resizer changes volumes whose claims get another VolumeAttributesClass. */ -}}
{{- define "carver.modify" -}}
{{- $modify := .Values.sidecars.resizer.modify | toString }}
{{- if eq $modify "auto" }}
{{- if .Values.controller.enabled }}true{{ end }}
{{- else if eq $modify "true" }}true{{ end }}
{{- end }}

{{- /*
A map with another's values in place of its own, key by key. Helm's own merge and mergeOverwrite take
false, 0 and an empty list for nothing.
*/ -}}
{{- define "carver.merged" -}}
{{- $merged := deepCopy .map }}
{{- range $key, $value := .over }}
{{- if and (kindIs "map" $value) (kindIs "map" (get $merged $key)) }}
{{- $value = include "carver.merged" (dict "map" (get $merged $key) "over" $value) | fromYaml }}
{{- end }}
{{- $_ := set $merged $key $value }}
{{- end }}
{{- toYaml $merged }}
{{- end }}

{{- /* An image's name: of its repository, tag and digest. */ -}}
{{- define "carver.image" -}}
{{ .repository }}{{ with .tag }}:{{ . }}{{ end }}{{ with .digest }}@{{ . }}{{ end }}
{{- end }}

{{- /* "true" where snapshots are to be had. */ -}}
{{- define "carver.snapshots" -}}
{{- $enabled := .Values.sidecars.snapshotter.enabled | toString }}
{{- if eq $enabled "auto" }}
{{- if .Capabilities.APIVersions.Has "snapshot.storage.k8s.io/v1" }}true{{ end }}
{{- else if eq $enabled "true" }}true{{ end }}
{{- end }}

{{- /*
The DaemonSets that there are, each a map of its own values: one without a name, or the pools, which
have from the chart's values what they do not say.
*/ -}}
{{- define "carver.pools" -}}
{{- $common := pick .Values "image" "lvm2" "udev" "settings" "config" "demo" "node" }}
{{- $pools := list }}
{{- range .Values.pools | default (list dict) }}
{{- $pool := include "carver.merged" (dict "map" $common "over" .) | fromYaml }}
{{- $pools = append $pools (merge $pool (dict "name" "")) }}
{{- end }}
{{- toYaml $pools }}
{{- end }}

{{- /* config.toml of a pool. What Kubernetes decides comes from the chart's own values. */ -}}
{{- define "carver.config" -}}
{{- $own := dict "log_format" "json" -}}
{{- if not .Values.controller.enabled -}}
# One external-resizer serves the whole cluster and would call the wrong node's Controller; so
# NodeExpandVolume grows the volume too.
controller_expand = false
{{ end -}}
lvm = {{ ternary "host" "direct" (eq .pool.lvm2 "host") | quote }}
{{- if ne .Values.driverName "lvm.csi.carver" }}
driver_name = {{ .Values.driverName | quote }}
{{- end }}
{{- if ne (include "carver.pluginDir" .) "/var/lib/kubelet/plugins/lvm.csi.carver" }}
endpoint = {{ printf "%s/csi.sock" (include "carver.pluginDir" .) | quote }}
{{- end }}
{{- if ne .Values.kubeletDir "/var/lib/kubelet" }}
kubelet_dir = [{{ .Values.kubeletDir | quote }}]
registration_directory = {{ printf "%s/plugins_registry" .Values.kubeletDir | quote }}
{{- end }}
{{- if and .Values.orphans.enabled (not .Values.controller.enabled) }}
{{- $_ := set $own "orphan_interval_seconds" (int .Values.orphans.intervalSeconds) }}
{{- end }}
{{- if .Values.attach }}
{{- $_ := set $own "attach" true }}
{{- end }}
{{- if .Values.evacuation.enabled }}
{{- $_ := set $own "evacuation" true }}
{{- end }}
{{- if ne (include "carver.stateDir" .) "/var/lib/carver" }}
{{- $_ := set $own "file" (printf "%s/carver.img" (include "carver.stateDir" .)) }}
{{- end }}
{{ ternary "metrics" "health" .Values.metrics.enabled }}_address = {{ printf ":%d" (int .Values.metrics.port) | quote }}
{{- /* A JSON text, number, truth or list of them is one of TOML, too. */}}
{{- range $key, $value := include "carver.merged" (dict "map" $own "over" .pool.settings) | fromYaml }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- with .pool.config }}
{{ . | trim }}
{{- end }}
{{- end }}

{{- /* Keeps kubelet from starting the containers below until Carver has its socket, for two minutes at
     most: a sidecar that finds none leaves after 30 seconds, and is started ever more rarely. */ -}}
{{- define "carver.untilSocket" -}}
{{- $socket := printf "%s/csi.sock" (include "carver.socketDir" .) -}}
postStart:
  exec:
    command:
      - sh
      - -c
      - for i in $(seq 120); do if [ -S {{ $socket }} ]; then exit; fi; sleep 1; done
{{- end }}

{{- define "carver.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
{{ toYaml .probe }}
{{- end }}

{{- /* A pool's affinity: its own, on the processors that there is an image for. */ -}}
{{- define "carver.nodeAffinity" -}}
{{- $affinity := deepCopy .node.affinity }}
{{- $nodes := $affinity.nodeAffinity | default dict }}
{{- $required := $nodes.requiredDuringSchedulingIgnoredDuringExecution | default dict }}
{{- $processor := dict "key" "kubernetes.io/arch" "operator" "In" "values" .image.architectures }}
{{- $terms := list }}
{{- range $required.nodeSelectorTerms | default (list dict) }}
{{- $expressions := append (.matchExpressions | default list) $processor }}
{{- $terms = append $terms (set (deepCopy .) "matchExpressions" $expressions) }}
{{- end }}
{{- $_ := set $nodes "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) }}
{{- $_ := set $affinity "nodeAffinity" $nodes }}
{{- toYaml $affinity }}
{{- end }}

{{- /*
The Deployment's affinity: its own, and for the controller a processor that there is an image for, for
the resizer a node that has a Carver to ask.
*/ -}}
{{- define "carver.controllerAffinity" -}}
{{- if .Values.controller.enabled }}
{{- include "carver.nodeAffinity" (dict "node" .Values.controller "image" .Values.image) }}
{{- else }}
{{- $labels := include "carver.selector" . | fromYaml }}
{{- $_ := set $labels "app.kubernetes.io/component" "node" }}
{{- $carver := dict "labelSelector" (dict "matchLabels" $labels) "topologyKey" "kubernetes.io/hostname" }}
{{- $affinity := deepCopy .Values.controller.affinity }}
{{- $pods := $affinity.podAffinity | default dict }}
{{- $required := append ($pods.requiredDuringSchedulingIgnoredDuringExecution | default list) $carver }}
{{- $_ := set $pods "requiredDuringSchedulingIgnoredDuringExecution" $required }}
{{- $_ := set $affinity "podAffinity" $pods }}
{{- toYaml $affinity }}
{{- end }}
{{- end }}

{{- /* A pod's fields that DaemonSets and Deployment have alike; `values` are node or controller. */ -}}
{{- define "carver.pod" -}}
priorityClassName: {{ .values.priorityClassName }}
terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds }}
{{- if .values.hostNetwork }}
hostNetwork: true
{{- end }}
{{- with .values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* What the values of a sidecar, `one`, say of its container beside arguments and environment. */ -}}
{{- define "carver.sidecar" -}}
securityContext:
  {{- include "carver.unprivileged" . | nindent 2 }}
{{- with .one.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: socket
    mountPath: {{ include "carver.socketDir" .root }}
{{- with .one.extraVolumeMounts }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- end }}

{{- define "carver.unprivileged" -}}
{{- /* It talks to the API server and to one socket, which only root may open. */}}
{{- $security := dict "runAsUser" 0 "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true }}
{{- $_ := set $security "capabilities" (dict "drop" (list "ALL")) }}
{{- $_ := set $security "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- if and .root.Values.sidecars.seLinuxOptions (not .root.Values.controller.enabled) }}
{{- $_ := set $security "seLinuxOptions" .root.Values.sidecars.seLinuxOptions }}
{{- end }}
{{- include "carver.merged" (dict "map" $security "over" (.one.securityContext | default dict)) }}
{{- end }}

{{- define "carver.check" -}}
{{- $set := list "attach" "controller_expand" "driver_name" "endpoint" "evacuation" "health_address" "kubelet_dir" "lvm" "metrics_address" "node_id" "registration_directory" }}
{{- if .Values.controller.enabled }}
{{- $set = concat $set (list "advertised_host" "controller_address" "controller_authority" "controllers" "enrolment_address" "enrolment_directory" "evacuation_grace_seconds" "health_interval_seconds" "node_account" "orphan_interval_seconds" "release_lost_claims") }}
{{- end }}
{{- $names := list }}
{{- range include "carver.pools" . | fromYamlArray }}
{{- if and (eq .lvm2 "host") (not .udev) }}
{{- fail "lvm2 of the host goes with the host's udev: udev must be true" }}
{{- end }}
{{- if not (or .demo (regexMatch "(?m)^\\s*(\\[\\[\\s*(classes|groups)\\s*\\]\\]|(classes|groups)\\s*=\\s*\\[\\s*\\{)" .config)) }}
{{- $where := ternary "" (printf " for the pool %s" .name) (empty .name) }}
{{- fail (printf "no storage is configured%s: give `config` with [[classes]] that name volume groups (docs/configuration.md), or, for a trial on a sparse file of each node, `demo: true`" $where) }}
{{- end }}
{{- range $key, $_ := .settings }}
{{- if has $key $set }}
{{- fail (printf "settings.%s: the chart sets it, by a value of another name" $key) }}
{{- end }}
{{- end }}
{{- if has .name $names }}
{{- fail (printf "pools: %s is there twice" .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- range .Values.pools }}
{{- if not (or ((.node).nodeSelector) ((.node).affinity)) }}
{{- fail (printf "pools: %s says of no nodeSelector and no affinity which nodes are its own" .name) }}
{{- end }}
{{- end }}
{{- if and .Values.attach (not .Values.controller.enabled) }}
{{- fail "attach needs controller.enabled: one external-attacher serves the whole cluster, and would call the wrong node's Carver" }}
{{- end }}
{{- if and .Values.evacuation.enabled (not .Values.controller.enabled) }}
{{- fail "evacuation needs controller.enabled: the controller moves the volumes" }}
{{- end }}
{{- if and .Values.releaseLostClaims.enabled (not (and .Values.controller.enabled .Values.controller.forgetDeletedNodes)) }}
{{- fail "releaseLostClaims needs controller.enabled and controller.forgetDeletedNodes: no other node is lost for good" }}
{{- end }}
{{- if and (or .Values.podMonitor.enabled .Values.serviceMonitor.enabled) (not .Values.metrics.enabled) }}
{{- fail "podMonitor and serviceMonitor need metrics" }}
{{- end }}
{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled }}
{{- fail "podMonitor and serviceMonitor would both ask: enable one" }}
{{- end }}
{{- with .Values.inlinePolicy }}
{{- if and .enabled (not (or .maximumSize .namespaces .serviceAccounts)) }}
{{- fail "inlinePolicy.enabled limits nothing: give maximumSize, namespaces or serviceAccounts" }}
{{- end }}
{{- end }}
{{- with .Values.sidecars.snapshotMetadata }}
{{- if and .enabled (not (and .tlsSecret .caCert)) }}
{{- fail "sidecars.snapshotMetadata needs tlsSecret and caCert" }}
{{- end }}
{{- if and .enabled $.Values.pools (not $.Values.controller.enabled) }}
{{- fail "sidecars.snapshotMetadata without controller.enabled is for clusters of one node, and pools are for several" }}
{{- end }}
{{- end }}
{{- if and .Values.sidecars.snapshotter.groups (not (include "carver.snapshots" .)) }}
{{- fail "sidecars.snapshotter.groups needs sidecars.snapshotter.enabled" }}
{{- end }}
{{- end }}
