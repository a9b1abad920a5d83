{{/* The two containers of a pod. Ports and paths are fixed: nothing else is in the pod. */}}

{{/* A gRPC probe: (dict "port" N "service" NAME "timing" MAP). */}}
{{- define "octavo.probe" -}}
grpc:
  port: {{ .port }}
  service: {{ .service }}
{{ toYaml .timing }}
{{- end }}

{{- define "octavo.bindAddress" -}}
{{- ternary (printf "[%s]" .Values.bindAddress) .Values.bindAddress (contains ":" .Values.bindAddress) }}
{{- end }}

{{- define "octavo.kvManagerContainer" -}}
{{- $kv := .Values.kvManager }}
- name: kv-manager
  image: {{ include "octavo.image" (list . .Values.image.kvManager) }}
  imagePullPolicy: {{ .Values.image.kvManager.pullPolicy }}
  restartPolicy: Always
  args:
    - kv-manager
    - --kv-address=unix:/run/octavo/kv.sock
    - "--kv-metrics-address={{ include "octavo.bindAddress" . }}:9401"
    - "--kv-health-address={{ include "octavo.bindAddress" . }}:50053"
    - --log-format=json
    - --grace-seconds={{ .Values.termination.kvGraceSeconds }}
    {{- with include "octavo.settings" $kv.settings }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $kv.args }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  env:
    - name: HOME
      value: /tmp
    # For `kubectl exec`: octavo pool, octavo check.
    - name: OCTAVO_KV_ADDRESS
      value: unix:/run/octavo/kv.sock
    {{- with include "octavo.env" $kv.env }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- with $kv.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - name: kv-health
      containerPort: 50053
    - name: kv-metrics
      containerPort: 9401
  startupProbe:
    {{- include "octavo.probe" (dict "port" 50053 "service" "readiness" "timing" $kv.startupProbe) | nindent 4 }}
  livenessProbe:
    {{- include "octavo.probe" (dict "port" 50053 "service" "liveness" "timing" $kv.livenessProbe) | nindent 4 }}
  readinessProbe:
    {{- include "octavo.probe" (dict "port" 50053 "service" "readiness" "timing" $kv.readinessProbe) | nindent 4 }}
  {{- with .Values.containerSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $kv.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - name: run
      mountPath: /run/octavo
    - name: kv-tmp
      mountPath: /tmp
    {{- with $kv.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/*
Threads of the model: the CPUs that are requested, rounded up. Without a limit the program would take all of the node's.
Empty when nothing is requested, or when the settings say.
*/}}
{{- define "octavo.threads" -}}
{{- $cpu := dig "requests" "cpu" "" .Values.runner.resources | toString }}
{{- if and $cpu (not (hasKey .Values.runner.settings "numThreads")) }}
{{- $cpus := ternary (divf (trimSuffix "m" $cpu | float64) 1000) (float64 $cpu) (hasSuffix "m" $cpu) }}
{{- ceil $cpus | int }}
{{- end }}
{{- end }}

{{- define "octavo.runnerArgs" -}}
- model-runner
- --kv-address=unix:/run/octavo/kv.sock
- "--runner-address={{ include "octavo.bindAddress" . }}:50051"
- "--runner-metrics-address={{ include "octavo.bindAddress" . }}:9402"
- "--runner-health-address={{ include "octavo.bindAddress" . }}:50052"
- --runner-admin-address=unix:/run/octavo/admin.sock
{{- with include "octavo.modelPath" . }}
- {{ printf "--model=%s" . | quote }}
{{- end }}
{{- with .Values.model.name }}
- {{ printf "--model-name=%s" . | quote }}
{{- end }}
- --log-format=json
- --grace-seconds={{ .Values.termination.graceSeconds }}
{{- if .Values.tls.secretName }}
- --tls-cert=/etc/octavo/tls/tls.crt
- --tls-key=/etc/octavo/tls/tls.key
{{- if .Values.tls.clientAuth }}
- --tls-client-ca=/etc/octavo/tls/ca.crt
{{- end }}
{{- end }}
{{- if .Values.auth.tokensSecret }}
- --auth-tokens=/etc/octavo/auth/{{ .Values.auth.tokensKey }}
{{- if .Values.auth.allowPlaintext }}
- --allow-plaintext-tokens
{{- end }}
{{- end }}
{{- if .Values.gateway.enabled }}
# A door for the gateway, which knows neither TLS nor tokens; nobody else is let to it.
- "--vllm-address={{ include "octavo.bindAddress" . }}:50054"
{{- with .Values.gateway.tenant }}
- {{ printf "--vllm-tenant=%s" . | quote }}
{{- end }}
{{- end }}
{{- if not (hasKey .Values.runner.settings "vllmGrpc") }}
# The image could at port 50051, too, and whoever calls it can read what others have asked.
- --no-vllm-grpc
{{- end }}
{{- with include "octavo.threads" . }}
- --num-threads={{ . }}
{{- end }}
{{- with include "octavo.settings" .Values.runner.settings }}
{{ . }}
{{- end }}
{{- with .Values.runner.args }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The startup probe may fail for startupSeconds, counted in whole periods. */}}
{{- define "octavo.startupFailures" -}}
{{- $period := int .Values.runner.startupProbe.periodSeconds }}
{{- div (add (int .Values.runner.startupSeconds) (sub $period 1)) $period }}
{{- end }}

{{- define "octavo.runnerContainer" -}}
{{- $runner := .Values.runner }}
{{- $startup := dict "failureThreshold" (include "octavo.startupFailures" . | int) }}
- name: model-runner
  image: {{ include "octavo.image" (list . .Values.image.runner) }}
  imagePullPolicy: {{ .Values.image.runner.pullPolicy }}
  args:
    {{- include "octavo.runnerArgs" . | nindent 4 }}
  env:
    - name: HOME
      value: /tmp
    # For `kubectl exec`: octavo pool, octavo check.
    - name: OCTAVO_KV_ADDRESS
      value: unix:/run/octavo/kv.sock
    - name: XDG_CACHE_HOME
      value: /var/cache/octavo
    - name: TRITON_CACHE_DIR
      value: /var/cache/octavo/triton
    - name: FLASHINFER_WORKSPACE_BASE
      value: /var/cache/octavo
    - name: CUDA_CACHE_PATH
      value: /var/cache/octavo/cuda
    {{- with include "octavo.env" $runner.env }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- with $runner.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - name: grpc
      containerPort: 50051
    - name: runner-health
      containerPort: 50052
    - name: runner-metrics
      containerPort: 9402
    {{- if .Values.gateway.enabled }}
    - name: vllm
      containerPort: 50054
    {{- end }}
  startupProbe:
    {{- include "octavo.probe" (dict "port" 50052 "service" "readiness" "timing" (merge $startup $runner.startupProbe)) | nindent 4 }}
  livenessProbe:
    {{- include "octavo.probe" (dict "port" 50052 "service" "liveness" "timing" $runner.livenessProbe) | nindent 4 }}
  readinessProbe:
    {{- include "octavo.probe" (dict "port" 50052 "service" "readiness" "timing" $runner.readinessProbe) | nindent 4 }}
  lifecycle:
    preStop:
      exec:
        command:
          - octavo
          - drain
          - --admin-address=unix:/run/octavo/admin.sock
          - --lame-duck-seconds={{ .Values.termination.lameDuckSeconds }}
          - --drain-seconds={{ .Values.termination.drainSeconds }}
  {{- with .Values.containerSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $runner.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - name: run
      mountPath: /run/octavo
    - name: tmp
      mountPath: /tmp
    - name: cache
      mountPath: /var/cache/octavo
    {{- if $runner.shm.enabled }}
    - name: shm
      mountPath: /dev/shm
    {{- end }}
    {{- if .Values.tls.secretName }}
    - name: tls
      mountPath: /etc/octavo/tls
      readOnly: true
    {{- end }}
    {{- if .Values.auth.tokensSecret }}
    - name: auth
      mountPath: /etc/octavo/auth
      readOnly: true
    {{- end }}
    {{- with include "octavo.modelMount" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $runner.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
