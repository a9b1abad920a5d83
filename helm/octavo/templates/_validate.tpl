{{/* What a schema can't say: values that don't go together, each with a sentence. */}}

{{- define "octavo.validate" -}}
{{- include "octavo.validateTermination" . }}
{{- include "octavo.validateModel" . }}
{{- include "octavo.validateSecurity" . }}
{{- include "octavo.validateGateway" . }}
{{- include "octavo.validateScaling" . }}
{{- end }}

{{- define "octavo.validateTermination" -}}
{{- $least := include "octavo.terminationSeconds" . | int }}
{{- $given := int .Values.termination.gracePeriodSeconds }}
{{- if and $given (le $given $least) }}
{{- fail (printf "termination.gracePeriodSeconds is %d, but lame duck, drain and both graces take %d: set more than that, or 0." $given $least) }}
{{- end }}
{{- end }}

{{- define "octavo.validateModel" -}}
{{- $model := .Values.model }}
{{- $claim := include "octavo.modelClaim" . }}
{{- if and $model.pvc.create $model.pvc.existingClaim }}
{{- fail "model.pvc.create makes a claim and model.pvc.existingClaim names one: set one of them." }}
{{- end }}
{{- if and (eq $model.source "demo") $model.path }}
{{- fail "model.path is set, but model.source is demo: say path, pvc, download or image." }}
{{- end }}
{{- if and (eq $model.source "path") (not (hasPrefix "/" $model.path)) }}
{{- fail (printf "model.path is %q, but model.source=path needs the absolute path of a directory or a .gguf file in the container." $model.path) }}
{{- end }}
{{- if and (eq $model.source "pvc") (not $claim) }}
{{- fail "model.source=pvc needs model.pvc.existingClaim, or model.pvc.create." }}
{{- end }}
{{- if and (eq $model.source "download") (not $model.download.repository) }}
{{- fail "model.source=download needs model.download.repository, such as org/name." }}
{{- end }}
{{- if eq $model.source "image" }}
{{- if not $model.image.reference }}
{{- fail "model.source=image needs model.image.reference." }}
{{- end }}
{{- if not (semverCompare ">=1.33-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "model.source=image needs Kubernetes 1.33 or newer, this is %s: use pvc or download." .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- end }}
{{- $used := and $model.pvc.create (has $model.source (list "pvc" "download")) }}
{{- $many := or .Values.autoscaling.enabled (gt (int .Values.replicaCount) 1) }}
{{- $shared := or (has "ReadWriteMany" $model.pvc.accessModes) (has "ReadOnlyMany" $model.pvc.accessModes) }}
{{- if and $used $many (not $shared) }}
{{- fail (printf "model.pvc.accessModes is %v, but there can be several pods: it needs ReadWriteMany, or use model.source=download without a claim." $model.pvc.accessModes) }}
{{- end }}
{{- end }}

{{- define "octavo.validateSecurity" -}}
{{- $tls := .Values.tls }}
{{- $auth := .Values.auth }}
{{- if and (or $tls.clientAuth $tls.clientSecretName) (not $tls.secretName) }}
{{- fail "tls.clientAuth and tls.clientSecretName need tls.secretName." }}
{{- end }}
{{- if and $auth.tokensSecret (not $tls.secretName) (not $auth.allowPlaintext) }}
{{- fail "auth.tokensSecret without tls.secretName would send tokens in plaintext: set tls.secretName, or auth.allowPlaintext=true where a service mesh encrypts." }}
{{- end }}
{{- end }}

{{- define "octavo.validateGateway" -}}
{{- $gateway := .Values.gateway }}
{{- $tokens := .Values.auth.tokensSecret }}
{{- if and $gateway.enabled $tokens (not $gateway.tenant) }}
{{- fail "gateway.enabled with auth.tokensSecret needs gateway.tenant: smg hands no token on, so all requests through it are those of one tenant of the Secret." }}
{{- end }}
{{- if and $gateway.tenant (not $tokens) }}
{{- fail (printf "gateway.tenant is %q, one of auth.tokensSecret, which is not set." $gateway.tenant) }}
{{- end }}
{{- if and $gateway.enabled (not .Values.networkPolicy.enabled) (not $gateway.allowOpenDoor) }}
{{- fail "gateway.enabled with networkPolicy.enabled=false would let anybody to port 50054 of the pods, which is for the gateway alone: it asks for neither tokens nor certificates, and tells what others have asked. Set gateway.allowOpenDoor=true where something else keeps others away." }}
{{- end }}
{{- end }}

{{- define "octavo.validateScaling" -}}
{{- $scaling := .Values.autoscaling }}
{{- if $scaling.enabled }}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{- fail (printf "autoscaling.minReplicas is %d, more than maxReplicas, which is %d." (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
{{- end }}
{{- if and (eq $scaling.kind "keda") (not $scaling.keda.serverAddress) }}
{{- fail "autoscaling.kind=keda needs autoscaling.keda.serverAddress, the URL of Prometheus." }}
{{- end }}
{{- if and (eq $scaling.kind "hpa") (not (gt (int $scaling.minReplicas) 0)) }}
{{- fail "autoscaling.minReplicas is 0, which a HorizontalPodAutoscaler does not take: set 1, or kind keda." }}
{{- end }}
{{- end }}
{{- end }}
