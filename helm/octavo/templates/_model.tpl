{{/* Where the weights come from: the volume, its mount, the runner's --model, and the init container that downloads. */}}

{{- define "octavo.modelClaim" -}}
{{- if .Values.model.pvc.create }}
{{- include "octavo.fullname" . }}-model
{{- else }}
{{- .Values.model.pvc.existingClaim }}
{{- end }}
{{- end }}

{{/* What --model says; empty: the demo model. */}}
{{- define "octavo.modelPath" -}}
{{- $model := .Values.model }}
{{- if eq $model.source "path" }}
{{- $model.path }}
{{- else if ne $model.source "demo" }}
{{- list (include "octavo.modelDirectory" .) (trimAll "/" $model.path) | compact | join "/" }}
{{- end }}
{{- end }}

{{/* A download has a folder of its own in a claim, by repository, so that another one does not mix with it. */}}
{{- define "octavo.modelDirectory" -}}
{{- if eq .Values.model.source "download" -}}
/models/{{ .Values.model.download.repository }}
{{- else -}}
/models
{{- end }}
{{- end }}

{{- define "octavo.modelVolume" -}}
{{- $model := .Values.model }}
{{- if has $model.source (list "pvc" "download" "image") }}
- name: model
  {{- if eq $model.source "image" }}
  image:
    reference: {{ $model.image.reference | quote }}
    pullPolicy: {{ $model.image.pullPolicy }}
  {{- else if include "octavo.modelClaim" . }}
  persistentVolumeClaim:
    claimName: {{ include "octavo.modelClaim" . | quote }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $model.download.sizeLimit | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "octavo.modelMount" -}}
{{- if has .Values.model.source (list "pvc" "download" "image") }}
- name: model
  mountPath: /models
  readOnly: true
{{- end }}
{{- end }}

{{- define "octavo.downloadContainer" -}}
{{- $download := .Values.model.download }}
- name: download
  image: {{ include "octavo.image" (list . .Values.image.runner) }}
  imagePullPolicy: {{ .Values.image.runner.pullPolicy }}
  command: [hf]
  args:
    - download
    - {{ $download.repository | quote }}
    - {{ printf "--revision=%s" $download.revision | quote }}
    - --local-dir={{ include "octavo.modelDirectory" . }}
    {{- range $download.include }}
    - {{ printf "--include=%s" . | quote }}
    {{- end }}
    {{- range $download.exclude }}
    - {{ printf "--exclude=%s" . | quote }}
    {{- end }}
  env:
    - name: HOME
      value: /tmp
    # Beside the weights: what it keeps can be as large as they are.
    - name: HF_HOME
      value: /models/.huggingface
    - name: HF_HUB_DISABLE_UPDATE_CHECK
      value: "1"
    - name: HF_HUB_DISABLE_TELEMETRY
      value: "1"
    - name: HF_HUB_DISABLE_PROGRESS_BARS
      value: "1"
    {{- with $download.endpoint }}
    - name: HF_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- if $download.token.secretName }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ $download.token.secretName | quote }}
          key: {{ $download.token.key | quote }}
    {{- end }}
    {{- with include "octavo.env" $download.env }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- with .Values.containerSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $download.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    - name: model
      mountPath: /models
{{- end }}
