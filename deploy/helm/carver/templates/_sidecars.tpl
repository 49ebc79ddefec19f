{{- /*
The stock sidecars beside the socket: in the controller's pod all, each with a leader among the
replicas; without a controller those of each node.
*/ -}}
{{- define "carver.sidecars" -}}
{{- $root := . }}
{{- $central := .Values.controller.enabled }}
{{- with .Values.sidecars.provisioner }}
- name: provisioner
  image: {{ include "carver.image" .image }}
  imagePullPolicy: {{ .image.pullPolicy }}
  args:
    - --csi-address={{ include "carver.socketDir" $root }}/csi.sock
    {{- if $central }}
    {{- include "carver.leader" $root | nindent 4 }}
    {{- /* All nodes are allowed, and the chosen one is preferred: a restore goes to its source's. */}}
    {{- else }}
    - --node-deployment
    - --node-deployment-immediate-binding={{ .immediateBinding.enabled }}
    {{- if .immediateBinding.enabled }}
    - --node-deployment-base-delay={{ .immediateBinding.baseDelay }}
    - --node-deployment-max-delay={{ .immediateBinding.maxDelay }}
    {{- end }}
    # A volume is asked for on the node that was chosen, and on no other.
    - --strict-topology
    {{- end }}
    - --immediate-topology=false
    - --enable-capacity
    {{- if $central }}
    # The Deployment owns the objects of the nodes' capacity: they go with it.
    - --capacity-ownerref-level=2
    # A node that hangs holds up one of them.
    - --capacity-threads=10
    # One object for each node and class: 3,000 are written in a minute, and not one a second.
    - --kube-api-capacity-qps=50
    - --kube-api-capacity-burst=100
    {{- else }}
    # The pod owns the objects of its node's capacity: they go with it, and with the node.
    - --capacity-ownerref-level=0
    {{- end }}
    - --capacity-poll-interval={{ .capacityPollInterval }}
    - --extra-create-metadata
    - --timeout={{ .timeout }}
    {{- if not (include "carver.snapshots" $root) }}
    - --snapshot-orphan-sweep-interval=0
    {{- end }}
    - --http-endpoint=:{{ .port }}
    - --v={{ .logLevel }}
    {{- with .extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "carver.observed" (dict "root" $root "name" "provisioner" "port" .port "leads" $central) | nindent 2 }}
  env:
    {{- if not $central }}
    - name: NODE_NAME
      valueFrom:
        fieldRef:
          fieldPath: spec.nodeName
    {{- end }}
    {{- include "carver.namespaceVariable" $root | nindent 4 }}
    - name: POD_NAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    {{- with .extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "carver.sidecar" (dict "root" $root "one" .) | nindent 2 }}
{{- end }}
{{- if include "carver.snapshots" . }}
{{- with .Values.sidecars.snapshotter }}
- name: snapshotter
  image: {{ include "carver.image" .image }}
  imagePullPolicy: {{ .image.pullPolicy }}
  args:
    - --csi-address={{ include "carver.socketDir" $root }}/csi.sock
    {{- if $central }}
    {{- include "carver.leader" $root | nindent 4 }}
    {{- else if not .groups }}
    # Acts on what the snapshot-controller has labelled with its node, which group snapshots
    # never are.
    - --node-deployment
    {{- end }}
    - --feature-gates=CSIVolumeGroupSnapshot={{ .groups }}
    - --timeout={{ .timeout }}
    - --http-endpoint=:{{ .port }}
    - --v={{ .logLevel }}
    {{- with .extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "carver.observed" (dict "root" $root "name" "snapshotter" "port" .port "leads" $central) | nindent 2 }}
  env:
    {{- if $central }}
    {{- include "carver.namespaceVariable" $root | nindent 4 }}
    {{- else }}
    - name: NODE_NAME
      valueFrom:
        fieldRef:
          fieldPath: spec.nodeName
    {{- end }}
    {{- with .extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "carver.sidecar" (dict "root" $root "one" .) | nindent 2 }}
{{- end }}
{{- end }}
{{- if $central }}
{{ include "carver.resizer" . }}
{{- end }}
{{- if .Values.attach }}
{{- with .Values.sidecars.attacher }}
- name: attacher
  image: {{ include "carver.image" .image }}
  imagePullPolicy: {{ .image.pullPolicy }}
  args:
    - --csi-address={{ include "carver.socketDir" $root }}/csi.sock
    {{- include "carver.leader" $root | nindent 4 }}
    - --reconcile-sync={{ .reconcileInterval }}
    # A volume that is attached takes four requests to the API server; 5 a second are the default.
    - --kube-api-qps=50
    - --kube-api-burst=100
    - --timeout={{ .timeout }}
    - --http-endpoint=:{{ .port }}
    - --v={{ .logLevel }}
    {{- with .extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "carver.observed" (dict "root" $root "name" "attacher" "port" .port "leads" true) | nindent 2 }}
  env:
    {{- include "carver.namespaceVariable" $root | nindent 4 }}
    {{- with .extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "carver.sidecar" (dict "root" $root "one" .) | nindent 2 }}
{{- end }}
{{- end }}
{{- with .Values.sidecars.snapshotMetadata }}
{{- if .enabled }}
- name: snapshot-metadata
  image: {{ include "carver.image" .image }}
  imagePullPolicy: {{ .image.pullPolicy }}
  args:
    - --csi-address={{ include "carver.socketDir" $root }}/csi.sock
    - --port=50051
    - --tls-cert=/run/snapshot-metadata/tls.crt
    - --tls-key=/run/snapshot-metadata/tls.key
    # Its health is a service of gRPC with TLS, which kubelet cannot ask.
    - --http-endpoint=:{{ .port }}
    - --timeout={{ .timeout }}
    - --v={{ .logLevel }}
    {{- with .extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .extraEnv }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "carver.observed" (dict "root" $root "name" "cbt-metrics" "port" .port "leads" false) | nindent 2 }}
    - name: cbt
      containerPort: 50051
      protocol: TCP
  {{- include "carver.sidecar" (dict "root" $root "one" .) | nindent 2 }}
    - name: snapshot-metadata
      mountPath: /run/snapshot-metadata
      readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{- define "carver.resizer" -}}
{{- $root := . }}
{{- with .Values.sidecars.resizer -}}
- name: resizer
  image: {{ include "carver.image" .image }}
  imagePullPolicy: {{ .image.pullPolicy }}
  args:
    - --csi-address={{ include "carver.socketDir" $root }}/csi.sock
    {{- include "carver.leader" $root | nindent 4 }}
    - --handle-volume-inuse-error=false
    {{- if not (include "carver.modify" $root) }}
    - --feature-gates=VolumeAttributesClass=false
    {{- end }}
    - --timeout={{ .timeout }}
    - --http-endpoint=:{{ .port }}
    - --v={{ .logLevel }}
    {{- with .extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "carver.observed" (dict "root" $root "name" "resizer" "port" .port "leads" true) | nindent 2 }}
  env:
    {{- include "carver.namespaceVariable" $root | nindent 4 }}
    {{- with .extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- include "carver.sidecar" (dict "root" $root "one" .) | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The port of a sidecar's metrics; where it `leads`, a leader's health is there, too. */ -}}
{{- define "carver.observed" -}}
{{- if .leads }}
{{- range $name := list "startupProbe" "livenessProbe" }}
{{ $name }}:
  {{- $probe := index $.root.Values.sidecars $name }}
  {{- include "carver.probe" (dict "path" "/healthz/leader-election" "port" $.name "probe" $probe) | nindent 2 }}
{{- end }}
{{- end }}
ports:
  - name: {{ .name }}
    containerPort: {{ .port }}
    protocol: TCP
{{- end }}

{{- /* The ports at which Carver and the sidecars have metrics; not every pod has all. */ -}}
{{- define "carver.metricsPorts" -}}
{{- with .Values.sidecars }}
- {name: metrics, port: {{ $.Values.metrics.port }}}
- {name: provisioner, port: {{ .provisioner.port }}}
- {name: resizer, port: {{ .resizer.port }}}
{{- if include "carver.snapshots" $ }}
- {name: snapshotter, port: {{ .snapshotter.port }}}
{{- end }}
{{- if $.Values.attach }}
- {name: attacher, port: {{ .attacher.port }}}
{{- end }}
{{- if .snapshotMetadata.enabled }}
- {name: cbt-metrics, port: {{ .snapshotMetadata.port }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "carver.leader" -}}
- --leader-election
- --leader-election-namespace=$(NAMESPACE)
{{- end }}

{{- define "carver.namespaceVariable" -}}
- name: NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- end }}
