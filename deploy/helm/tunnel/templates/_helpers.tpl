{{/* Prefix of the objects' names: the release's name if it contains that of the chart, as is usual for charts. */}}
{{- define "tunnel.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $long := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- default $long .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
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
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
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
{{- $lists := dict "cloud" (dict "allowFrom" list) "edge" (dict "targets" list) }}
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

{{/* Names of the Secrets, as YAML. */}}
{{- define "tunnel.secrets" -}}
{{- $fullname := include "tunnel.fullname" . -}}
cert: {{ default (printf "%s-cloud-cert" $fullname) .Values.cloud.certSecret }}
token: {{ default (printf "%s-cloud-token" $fullname) .Values.cloud.tokenSecret }}
users: {{ default (printf "%s-cloud-users" $fullname) .Values.cloud.usersSecret }}
edge: {{ default (printf "%s-edge-cert" $fullname) .Values.edge.certSecret }}
{{- end }}

{{/* Head of a Secret, up to its annotations; call it with (list . NAME). */}}
{{- define "tunnel.secret" -}}
{{- $root := first . -}}
apiVersion: v1
kind: Secret
metadata:
  name: {{ last . }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "tunnel.labels" (list $root "server") | nindent 4 }}
  annotations:
    helm.sh/hook: pre-install,pre-upgrade
{{- end }}
