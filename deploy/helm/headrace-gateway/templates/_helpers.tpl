{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* The image of the gateway. */}}
{{- define "headrace.gatewayImage" -}}
{{- $tag := printf "%s-gateway" .Chart.AppVersion -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default $tag }}
{{- end -}}
{{/* The image of services, with all formats. */}}
{{- define "headrace.servicesImage" -}}
{{- $full := printf "%s:%s-full" .Values.image.repository .Chart.AppVersion -}}
{{ .Values.servicesImage | default $full }}
{{- end -}}
