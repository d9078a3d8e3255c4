{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* The image of the operator, the model agent and the routers. */}}
{{- define "headrace.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{/* The one with all formats, of some runtimes. */}}
{{- define "headrace.fullImage" -}}
{{- if .Values.runtimes.fullImage -}}
{{ .Values.runtimes.fullImage }}
{{- else if .Values.image.digest -}}
{{ include "headrace.image" . }}
{{- else -}}
{{ include "headrace.image" . }}-full
{{- end -}}
{{- end -}}
