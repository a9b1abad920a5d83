{{/* Names, labels, images and the parts that pods share. */}}

{{- define "octavo.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* 45 characters at most: the longest name made from it has 17 more, and 63 are allowed. */}}
{{- define "octavo.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" }}
{{- else if contains (include "octavo.name" .) .Release.Name }}
{{- .Release.Name | trunc 45 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "octavo.name" .) | trunc 45 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "octavo.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "octavo.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Labels that select the pods of a component: (list ROOT COMPONENT). They never change. */}}
{{- define "octavo.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "octavo.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of a component's pods: (list ROOT COMPONENT). None changes with the chart's version alone: no pod would restart. */}}
{{- define "octavo.podLabels" -}}
{{- $root := index . 0 -}}
{{ include "octavo.selector" . }}
app.kubernetes.io/part-of: octavo
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of a component's objects: (list ROOT COMPONENT). */}}
{{- define "octavo.labels" -}}
{{- $root := index . 0 -}}
{{ include "octavo.podLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* An image's reference: (list ROOT IMAGE). */}}
{{- define "octavo.image" -}}
{{- $root := index . 0 }}
{{- $image := index . 1 }}
{{- $name := list $root.Values.image.registry $image.repository | compact | join "/" }}
{{- if $image.digest }}
{{- printf "%s@%s" $name $image.digest }}
{{- else }}
{{- printf "%s:%s" $name (default $root.Chart.AppVersion $image.tag) }}
{{- end }}
{{- end }}

{{/* Environment variables from a map of NAME: value or NAME: {valueFrom: ...}. */}}
{{- define "octavo.env" -}}
{{- $variables := list }}
{{- range $name, $value := . }}
{{- if kindIs "map" $value }}
{{- $variables = append $variables (merge (dict "name" $name) $value) }}
{{- else }}
{{- $variables = append $variables (dict "name" $name "value" (ternary $value (toJson $value) (kindIs "string" $value))) }}
{{- end }}
{{- end }}
{{- with $variables }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* Arguments from settings: kvCacheMemory: 8GiB is --kv-cache-memory=8GiB, cudaGraphs: false is --no-cuda-graphs. */}}
{{- define "octavo.settings" -}}
{{- $arguments := list }}
{{- range $name, $value := . }}
{{- $flag := kebabcase $name }}
{{- if kindIs "bool" $value }}
{{- $arguments = append $arguments (printf "--%s%s" (ternary "" "no-" $value) $flag) }}
{{- else if not (kindIs "invalid" $value) }}
{{- $arguments = append $arguments (printf "--%s=%s" $flag (ternary $value (toJson $value) (kindIs "string" $value))) }}
{{- end }}
{{- end }}
{{- with $arguments }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* What every pod has. */}}
{{- define "octavo.podBasics" -}}
# A Service called octavo would become variables OCTAVO_..., which are settings here.
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Node selector, tolerations and affinity from a map that has them. */}}
{{- define "octavo.placement" -}}
{{- $placement := dict }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with get $ $key }}
{{- $_ := set $placement $key . }}
{{- end }}
{{- end }}
{{- with $placement }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* Spread constraints with the pods of a component as selector: (list ROOT COMPONENT). */}}
{{- define "octavo.spread" -}}
{{- $root := index . 0 }}
{{- $selector := dict "matchLabels" (include "octavo.selector" . | fromYaml) }}
{{- $constraints := list }}
{{- range $root.Values.topologySpreadConstraints }}
{{- $constraints = append $constraints (merge (deepCopy .) (dict "labelSelector" $selector)) }}
{{- end }}
{{- with $constraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* "true" or "": whether what needs a kind of the Prometheus operator is wanted: (list ROOT SWITCH KIND). */}}
{{- define "octavo.wanted" -}}
{{- $root := index . 0 }}
{{- $switch := toString (index . 1) }}
{{- $versions := $root.Capabilities.APIVersions }}
{{- $group := "monitoring.coreos.com/v1" }}
{{- if eq $switch "true" }}true
{{- else if eq $switch "auto" }}
{{- if or ($versions.Has (printf "%s/%s" $group (index . 2))) ($versions.Has $group) }}true{{- end }}
{{- end }}
{{- end }}

{{/* Seconds of the four phases of a pod's end. */}}
{{- define "octavo.terminationSeconds" -}}
{{- $t := .Values.termination }}
{{- add $t.lameDuckSeconds $t.drainSeconds $t.graceSeconds $t.kvGraceSeconds }}
{{- end }}

{{- define "octavo.gracePeriodSeconds" -}}
{{- $least := include "octavo.terminationSeconds" . | int }}
{{- .Values.termination.gracePeriodSeconds | int | default (add $least 15) }}
{{- end }}

{{- define "octavo.address" -}}
{{ include "octavo.fullname" . }}.{{ .Release.Namespace }}.svc:{{ .Values.service.port }}
{{- end }}

{{/* "true" or "": whether `helm test` has what it needs to call. */}}
{{- define "octavo.testable" -}}
{{- $tls := and .Values.tls.secretName .Values.tls.clientAuth (not .Values.tls.clientSecretName) }}
{{- $token := and .Values.auth.tokensSecret (not .Values.auth.test.tokenSecret) }}
{{- if and .Values.test.enabled (not $tls) (not $token) }}true{{- end }}
{{- end }}
