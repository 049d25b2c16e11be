{{/* Prefix of the objects' names: the release's name if it contains that of the chart, as is usual for charts. */}}
{{- define "tunnel.fullname" -}}
{{- /* Such values of an earlier chart would remove the servers. */}}
{{- if not (hasKey .Values.cloud "enabled") }}
{{- fail "helm upgrade: use --reset-then-reuse-values instead of --reuse-values, as the values of the earlier chart have no cloud.enabled" }}
{{- end }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $long := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- default $long .Values.fullnameOverride }}
{{- end }}

{{/* The same for objects outside of a namespace: releases of one name in two namespaces do not share them. */}}
{{- define "tunnel.clusterName" -}}
{{ .Release.Namespace }}-{{ include "tunnel.fullname" . }}
{{- end }}

{{/* Namespace of the approver. */}}
{{- define "tunnel.approverNamespace" -}}
{{- $own := printf "%s-approver" (include "tunnel.clusterName" .) }}
{{- if and (not .Values.approver.namespace) (gt (len $own) 63) }}
{{- fail (printf "approver.namespace: set it to an existing namespace, as %s is longer than 63 characters" $own) }}
{{- end }}
{{- default $own .Values.approver.namespace }}
{{- end }}

{{/* Labels that select the pods of a component; call it with (list . COMPONENT), like the next one. */}}
{{- define "tunnel.selector" -}}
{{- $root := first . -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{/* Labels of an object. */}}
{{- define "tunnel.labels" -}}
{{- $root := first . -}}
{{ include "tunnel.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Metadata of a component's pods; call it with (list . VALUES COMPONENT FILE), FILE being that of its config, or "". */}}
{{- define "tunnel.podMetadata" -}}
{{- $root := first . }}
{{- $values := index . 1 -}}
labels: {{- toYaml (merge (include "tunnel.selector" (list $root (index . 2)) | fromYaml) $values.podLabels) | nindent 2 }}
{{- $notes := deepCopy $values.podAnnotations }}
{{- with last . }}
{{- $notes = set $notes "checksum/config" (include "tunnel.checksum" (list $root .)) }}
{{- end }}
{{- with $notes }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The image of the tunnel, and its policy. */}}
{{- define "tunnel.image" -}}
{{- $version := printf ":%s" (default .Chart.AppVersion .Values.image.tag) }}
{{- with .Values.image.digest }}
{{- $version = printf "@%s" . }}
{{- end }}
image: {{ printf "%s%s" .Values.image.repository $version | quote }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* Rights of a container with the program: none. */}}
{{- define "tunnel.noRights" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{/* IP families of a Service. */}}
{{- define "tunnel.ipFamilies" -}}
{{- with .Values.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Where the pods of a component run; call it with (list . VALUES LABELS), LABELS being those that a Node must have. */}}
{{- define "tunnel.scheduling" -}}
{{- $root := first . }}
{{- $values := index . 1 -}}
nodeSelector: {{- toYaml (merge (deepCopy (last .)) $values.nodeSelector) | nindent 2 }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The label that the Nodes of servers, CoreDNS and the approver must have. */}}
{{- define "tunnel.serverNodes" -}}
node-restriction.kubernetes.io/tunnel-server: "true"
{{- end }}

{{/*
The config of the servers or the edges without the lists that running programs read again: another config starts new pods,
which ends long sessions, and another list must not.
*/}}
{{- define "tunnel.checksum" -}}
{{- $root := first . }}
{{- $cloud := dict "allowFrom" list "clients" (dict "enabled" false) }}
{{- $lists := dict "cloud" $cloud "edge" (dict "targets" list) }}
{{- $values := mergeOverwrite (deepCopy $root.Values) $lists }}
{{- tpl ($root.Files.Get (last .)) (merge (dict "Values" $values) (omit $root "Values")) | sha256sum }}
{{- end }}

{{/* Rules with which pods reach kube-apiserver. A NetworkPolicy cannot name it, so the ports are open to any address. */}}
{{- define "tunnel.toApiserver" -}}
- ports:
    {{- range .Values.networkPolicy.apiserverPorts }}
    - { port: {{ . }} }
    {{- end }}
{{- end }}

{{/* A list of texts, as TOML. */}}
{{- define "tunnel.list" -}}
[{{ range $at, $text := . }}{{ if $at }}, {{ end }}{{ quote $text }}{{ end }}]
{{- end }}

{{/* The environment of an edge: its node's name, with a prefix where the servers are another cluster's. */}}
{{- define "tunnel.edgeEnv" -}}
{{- $prefix := .Values.edge.join.prefix -}}
- { name: {{ ternary "NODE_NAME" "KUBERNETES_NODE" (empty $prefix) }}, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }
{{- with $prefix }}
- { name: NODE_NAME, value: {{ . }}$(KUBERNETES_NODE) }
{{- end }}
- { name: NODE_IP, valueFrom: { fieldRef: { fieldPath: status.hostIP } } }
# For the last good copy of its config{{ if .Values.cloud.enabled }}, until the pod is deleted{{ end }}.
- { name: STATE_DIRECTORY, value: {{ ternary "/run/tunnel" "/var/lib/tunnel-edge" .Values.cloud.enabled }} }
{{- with .Values.edge.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The name in the servers' certificate; empty for the host that edges dial. */}}
{{- define "tunnel.serverName" -}}
{{- default (ternary "tunnel.cloud.io" "" .Values.cloud.enabled) .Values.edge.dns }}
{{- end }}

{{/*
Files of the servers for links, clients and kube-apiserver's egress, as YAML: of the Secret of cloud.tls with cert-manager's
names, of that for links, or of cloud.certSecret.
*/}}
{{- define "tunnel.certificates" -}}
{{- $tls := .Values.cloud.tls }}
{{- range $use := list "links" "clients" "egress" }}
{{- $files := printf "certs/%s" (ternary "egress" "cloud" (eq $use "egress")) }}
{{- if or (index $tls $use) $tls.links }}
{{- $files = printf "tls/%s/tls" (ternary "links" $use (empty (index $tls $use))) }}
{{- end }}
{{ $use }}:
  cert: /etc/tunnel/{{ $files }}.crt
  key: /etc/tunnel/{{ $files }}.key
  ca: /etc/tunnel/{{ dir $files }}/ca.crt
{{- end }}
{{- end }}

{{/* Names of the Secrets, as YAML. */}}
{{- define "tunnel.secrets" -}}
{{- $fullname := include "tunnel.fullname" . -}}
cert: {{ default (printf "%s-cloud-cert" $fullname) .Values.cloud.certSecret | quote }}
token: {{ default (printf "%s-cloud-token" $fullname) .Values.cloud.tokenSecret | quote }}
users: {{ default (printf "%s-cloud-users" $fullname) .Values.cloud.usersSecret | quote }}
edge: {{ default (printf "%s-edge-cert" $fullname) .Values.edge.certSecret | quote }}
invitations: {{ $fullname }}-invitations
{{- end }}

{{/* Head of a Secret, up to its annotations; call it with (list . NAME). */}}
{{- define "tunnel.secret" -}}
{{- $root := first . -}}
apiVersion: v1
kind: Secret
metadata:
  name: {{ last . | quote }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "tunnel.labels" (list $root "server") | nindent 4 }}
  annotations:
    helm.sh/hook: pre-install,pre-upgrade
{{- end }}
